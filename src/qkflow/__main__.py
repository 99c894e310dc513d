"""`python -m qkflow` is the `qkflow` command, for `torchrun -m qkflow ...`."""

from qkflow.cli import main

if __name__ == "__main__":
    main()
