"""The guard as a server with OpenAI's protocol. Needs the extra `serve`.

server_settings   the settings of a server, however it is started
assembly          from settings to a server: models, policies, log, application; and where it listens
gate              keys, hosts and the number of requests; and errors as they leave, in the client's own words
app               routes, pages, and the decision log over HTTP
protocol          requests, checked, and translated into the records of the engine; those that another server answers
service           models, policies and targets: drafts are made, the guard decides; and the metrics
scheduler         requests to one model, their scored drafts, and their queue
remote            another server, and the form of its answers
upstream          another server that writes drafts, or answers instead
answers           answers and verdicts as they leave, and a client's cuts of them
completions       answers in OpenAI's form, each with its verdict, whole or as server-sent events
other_protocols   text completions and responses, as chat completions
in_vllm           the guard inside `vllm serve`
"""
