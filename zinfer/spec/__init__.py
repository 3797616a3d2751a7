"""Values that are asked about: models, machines, cases. Nothing here imports another room."""
