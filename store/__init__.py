"""The lake: arrays, token tables, catalog; from SQL to rows to arrays."""
