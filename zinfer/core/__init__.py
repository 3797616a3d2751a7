"""Values that every room speaks: models, machines, cases, engines and their options, units, errors."""
