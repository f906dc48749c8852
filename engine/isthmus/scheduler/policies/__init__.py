"""The built-in scheduling policies, one a file. They come through the hook that anyone may implement."""
