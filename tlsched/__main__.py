"""`python -m tlsched`: the same as the `tlsched` command."""

from tlsched.cli import main

if __name__ == "__main__":
    main()
