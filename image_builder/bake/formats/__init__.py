"""Byte formats, pure: input is bytes or an open file, and nothing here starts a program."""
