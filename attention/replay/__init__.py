"""Numerical replay: tensor, model and business layer, recorded where the candidate lives."""
