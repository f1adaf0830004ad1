"""What is looked at while a run trains: equal states, hangs, stragglers, losses."""
