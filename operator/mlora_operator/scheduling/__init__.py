"""Who goes first (``order``) and who gets a place (``admission``). Pure."""
