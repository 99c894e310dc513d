from qkflow.hub.attach import attach
