"""Byte formats, pure: what is read is given as bytes or an open file, nothing here starts a program."""
