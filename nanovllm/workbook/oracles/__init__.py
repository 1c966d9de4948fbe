"""Slow and obviously right models that graders compare answers with. They share no code with engine or solutions."""
