"""Values that every room speaks: models, machines, cases, engines, units, errors."""
