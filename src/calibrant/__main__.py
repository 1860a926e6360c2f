"""`python -m calibrant`, where the program `calibrant` is not on the path."""

from calibrant.cli import main

if __name__ == "__main__":
    main()
