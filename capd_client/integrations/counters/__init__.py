"""Where each framework counts its training steps."""
