# Install rules: written with the packaging work.
