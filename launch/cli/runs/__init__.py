"""`penstock runs`: one module for each kind of what it does with runs that exist."""
