"""Slapo's own tests restated, and its silent mistakes: each is refused or right here."""
