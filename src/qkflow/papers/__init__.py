"""Theory and reproductions of the three papers. Nothing but the command line imports this package."""
