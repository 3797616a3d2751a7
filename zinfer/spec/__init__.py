"""Specifications: models, checkpoints, machines, cases, units and errors. This room imports no other room."""
