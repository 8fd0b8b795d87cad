"""`python -m scalebench` is `scalebench`."""

from scalebench.cli.main import main

if __name__ == "__main__":
    main(prog_name="scalebench")
