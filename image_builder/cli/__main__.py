"""``python -m image_builder.cli``, as the launcher starts it."""

from image_builder.cli.main import main

main()
