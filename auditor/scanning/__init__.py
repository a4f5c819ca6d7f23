"""Examining sources: in parts where they are many, in processes of their own, and from what was found before."""
