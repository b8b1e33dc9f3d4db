"""`python -m mlx_spec` is `spec`."""

from .cli import main

if __name__ == "__main__":
    main()
