"""python -m schedlang, which torchrun starts as well: `torchrun ... -m schedlang run FILE`."""

from schedlang.cli import main

if __name__ == "__main__":
    main()
