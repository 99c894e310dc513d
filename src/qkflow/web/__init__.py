"""Local web pages: the secured loopback server behind `qkflow explore` and `qkflow watch`."""
