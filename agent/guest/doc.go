// Package guest speaks to envd inside one microVM, over the hybrid vsock socket that its VMM serves: a unix socket on which
// the host says "CONNECT <port>" and gets a byte stream to that guest port, or "LISTEN <port>" and gets the next one that the
// guest opens to that port of the host.
//
// Ports: 49983 is envd's data plane, 1024 its control service (api/guestpb), 1025 a forwarder to the TCP ports of the guest.
// Everything that comes out of a guest is hostile: answers are bounded in size and checked before they are believed.
package guest
