"""`shoal doctor`: tries what sandboxes need here; says what is missing, why it matters and what to do."""
