"""`python -m qkflow` is the `qkflow` command, for `torchrun -m qkflow ...`."""

from qkflow.cli.main import main

if __name__ == "__main__":
    main()
