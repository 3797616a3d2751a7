"""Analysis: values from records (groups, best configurations, comparisons, calibration, cost). Pure functions."""
