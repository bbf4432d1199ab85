"""The server of examples/inference_server.py under load: ``python -m tests.benchmarks.serving``.

__main__   rounds of load on all variants in turn: a table, a picture, JSON; or --faults
variants   the same server, with images prepared in other places
processes  a server in a process of its own
rounds     medians, ratios, the table
client     connections that ask again and again, and one that asks for /health
faults     workers killed and images that are none, while every answer is checked
plot       the picture
"""
