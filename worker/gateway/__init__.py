"""`adcascade gateway`: the HTTP interface in front of Kafka, as an `AdService` on the exchange of the client.

It decides nothing and stores nothing: any number of gateways may run, and each may be restarted.
"""
