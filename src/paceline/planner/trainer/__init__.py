"""What Paceline's own trainer holds under a layout, moment by moment."""
