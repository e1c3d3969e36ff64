"""How dates are written on staff's pages."""
