"""Divides a batch's sequences over ranks."""
