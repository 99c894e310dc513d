"""How fast the query-key circuit learns, measured against the output-value circuit."""
