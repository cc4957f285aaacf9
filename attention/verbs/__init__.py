"""What the verbs of `python -m attention` do; their flags stand in `attention/__main__.py`."""
