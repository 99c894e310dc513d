"""`qkflow explore`: look into one or two models in the browser."""
