// Package wire is the exec protocol between the machine that runs an emulated host and the init inside it.
//
// One TCP connection carries one command. Both sides write frames: one type byte, the payload's length as a 32-bit
// big-endian number, the payload. The server greets with Alive: a connection that breaks before was to nobody, and may be
// tried again. The client sends Start, then any number of Stdin frames (an empty one is the
// end of input). The server answers with Stdout and Stderr frames in the order they were read, and ends with one Exit.
// Alive frames from the server mean nothing but that it lives: they let either side notice that the other has gone.
//
// The package imports nothing of ours and opens no sockets.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// MaxPayload is the most bytes one frame may carry; a longer length is an error and never allocated.
const MaxPayload = 64 << 10

// Type says what a frame carries.
type Type uint8

// The frame types.
const (
	Start  Type = 'S' // client: a Command as JSON
	Stdin  Type = 'I' // client: bytes of standard input; empty: its end
	Stdout Type = 'O' // server: bytes of standard output
	Stderr Type = 'E' // server: bytes of standard error
	Exit   Type = 'X' // server: a Result as JSON; the last frame
	Alive  Type = 'A' // server: nothing
)

// ErrFrame is wrapped by every error that means the bytes are not a frame of this protocol.
var ErrFrame = errors.New("not an exec frame")

// Command is the payload of Start.
type Command struct {
	Token string   `json:"token"`         // the instance's secret; a wrong one ends the connection with no answer
	Shell string   `json:"shell"`         // run as /bin/sh -c
	Env   []string `json:"env,omitempty"` // added to the server's own, KEY=value
	Now   int64    `json:"now"`           // the client's clock, nanoseconds since 1970: the emulated host follows it
}

// Result is the payload of Exit.
type Result struct {
	Code  int    `json:"code"`            // exit status; 128+n if signal n ended the command
	Error string `json:"error,omitempty"` // why the command could not be run at all; Code means nothing then
}

// Frame is one message.
type Frame struct {
	Type    Type
	Payload []byte
}

func (t Type) known() bool {
	switch t {
	case Start, Stdin, Stdout, Stderr, Exit, Alive:
		return true
	}
	return false
}

const headerSize = 5 // type [0:1), length [1:5)

// Write writes one frame in one call of w.Write. The payload is at most MaxPayload bytes.
func Write(w io.Writer, t Type, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("%w: %d bytes in one frame", ErrFrame, len(payload))
	}
	b := make([]byte, headerSize, headerSize+len(payload))
	b[0] = byte(t)
	binary.BigEndian.PutUint32(b[1:], uint32(len(payload)))
	_, err := w.Write(append(b, payload...))
	return err
}

// WriteJSON writes v as the JSON payload of one frame.
func WriteJSON(w io.Writer, t Type, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %c frame: %w", t, err)
	}
	return Write(w, t, b)
}

// Read reads one frame. It answers io.EOF if the stream ended between two frames, io.ErrUnexpectedEOF within one, and
// an error wrapping ErrFrame for a type or length that the protocol does not have.
func Read(r io.Reader) (Frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return Frame{}, err
	}
	f := Frame{Type: Type(h[0])}
	if !f.Type.known() {
		return Frame{}, fmt.Errorf("%w: type %#02x", ErrFrame, h[0])
	}
	n := binary.BigEndian.Uint32(h[1:])
	if n > MaxPayload {
		return Frame{}, fmt.Errorf("%w: %d bytes in one frame", ErrFrame, n)
	}
	f.Payload = make([]byte, n)
	if _, err := io.ReadFull(r, f.Payload); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	return f, nil
}

// Decode reads the frame's payload as JSON into v.
func (f Frame) Decode(v any) error {
	if err := json.Unmarshal(f.Payload, v); err != nil {
		return fmt.Errorf("%w: %c payload: %w", ErrFrame, f.Type, err)
	}
	return nil
}
