"""One module per command of `adcascade`."""
