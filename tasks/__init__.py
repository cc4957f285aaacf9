"""The stages of a release and their helpers, one module each."""
