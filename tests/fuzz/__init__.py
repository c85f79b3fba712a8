"""A fuzzer that knows the structure of our files: `make fuzz SECONDS=60`.

It changes valid files in one to three places and seals them again, so that checksums and headers are right (`mutations`).
Each changed file is read in a child process with little memory and time (`children`). It must be refused in one line, or
give the result of the file before the change (`subjects`). Files that once did neither lie in `found`; a test reads all of
them again.
"""
