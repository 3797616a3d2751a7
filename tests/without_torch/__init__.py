"""This folder stands on the PYTHONPATH of every process of ``pytest --quick``, so that `sitecustomize` runs in each."""
