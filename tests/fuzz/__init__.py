"""Gives damaged input to everything that reads what others wrote. A reader returns a right value, or refuses."""
