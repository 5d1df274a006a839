"""Thin Ray shells round `app`: they carry out decisions and hold no algorithm."""
