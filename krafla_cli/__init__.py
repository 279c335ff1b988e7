"""``mlb``: converters and runners for compact model files (.mlb, .mlt, MLI1, LEMB)."""
