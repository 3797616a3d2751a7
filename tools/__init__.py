"""Tools of the project: what writes records, data and judgements, and what the tests share with them."""
