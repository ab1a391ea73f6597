"""Container Device Interface: specifications that name host devices for container runtimes."""
