"""What a person or a schedule starts, and the command line (`python -m flows`)."""
