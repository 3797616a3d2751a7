"""Analysis: records in, values out (groups, best configurations, comparisons, calibration, cost)."""
