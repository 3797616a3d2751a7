"""Folder on the PYTHONPATH of ``pytest --quick``, so that `sitecustomize` runs."""
