"""Policies, environments, candidates, golden sets, traffic readers, the evidence lake."""
