// Package apierr holds the one error type that reaches users, in its three spellings: a Go error, a ttrpc status between
// our processes, and the JSON body of REST answers. A code is a stable word; the message is a sentence that says what to do.
package apierr

import (
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Code is a stable word of the error table.
type Code string

// The codes, with the HTTP status each is answered with.
const (
	BadRequest         Code = "bad_request"         // 400, the field is named
	UnknownField       Code = "unknown_field"       // 400
	Unsupported        Code = "unsupported"         // 400
	NotImplemented     Code = "not_implemented"     // 501
	Unauthorized       Code = "unauthorized"        // 401
	NotFound           Code = "not_found"           // 404
	AlreadyPaused      Code = "already_paused"      // 409
	Busy               Code = "busy"                // 409, retryable
	GenerationMismatch Code = "generation_mismatch" // 409
	TemplateMismatch   Code = "template_mismatch"   // 409
	InTransition       Code = "in_transition"       // 409, retryable
	AlreadyRunning     Code = "already_running"     // 409
	Gone               Code = "gone"                // 410
	Deleting           Code = "deleting"            // 423, retryable
	Quota              Code = "quota"               // 429, retryable
	SandboxBroken      Code = "sandbox_broken"      // 500, kept for repair
	Internal           Code = "internal"            // 500
	NoCapacity         Code = "no_capacity"         // 503, retryable
	DiskFull           Code = "disk_full"           // 503, retryable
	NodeUnreachable    Code = "node_unreachable"    // 503, retryable
	Draining           Code = "draining"            // 503, retryable
	NotReady           Code = "not_ready"           // 503, retryable
)

type kind struct {
	http      int
	retryable bool
	grpc      codes.Code
}

var kinds = map[Code]kind{
	BadRequest:         {400, false, codes.InvalidArgument},
	UnknownField:       {400, false, codes.InvalidArgument},
	Unsupported:        {400, false, codes.InvalidArgument},
	NotImplemented:     {501, false, codes.Unimplemented},
	Unauthorized:       {401, false, codes.Unauthenticated},
	NotFound:           {404, false, codes.NotFound},
	AlreadyPaused:      {409, false, codes.FailedPrecondition},
	Busy:               {409, true, codes.Aborted},
	GenerationMismatch: {409, false, codes.FailedPrecondition},
	TemplateMismatch:   {409, false, codes.FailedPrecondition},
	InTransition:       {409, true, codes.Aborted},
	AlreadyRunning:     {409, false, codes.AlreadyExists},
	Gone:               {410, false, codes.NotFound},
	Deleting:           {423, true, codes.Aborted},
	Quota:              {429, true, codes.ResourceExhausted},
	SandboxBroken:      {500, false, codes.DataLoss},
	Internal:           {500, false, codes.Internal},
	NoCapacity:         {503, true, codes.ResourceExhausted},
	DiskFull:           {503, true, codes.ResourceExhausted},
	NodeUnreachable:    {503, true, codes.Unavailable},
	Draining:           {503, true, codes.Unavailable},
	NotReady:           {503, true, codes.Unavailable},
}

// Error is an error a user may see. SandboxID, VM and Envd are set where they apply.
type Error struct {
	Code      Code   `json:"code"`
	Message   string `json:"message"`
	SandboxID string `json:"sandboxID,omitempty"`
	VM        string `json:"vm,omitempty"`
	Envd      string `json:"envd,omitempty"`
	// RetryAfter is in seconds; 429 and 503 always carry one, at least 1.
	RetryAfter int `json:"retryAfter,omitempty"`

	cause error
}

// New makes an error of the given code with a formatted sentence; %w is honoured for errors.Is and errors.As.
func New(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// For returns a copy that names the sandbox.
func (e *Error) For(sandboxID string) *Error {
	c := *e
	c.SandboxID = sandboxID
	return &c
}

// With returns a copy that carries the two states of the sandbox.
func (e *Error) With(vm, envd string) *Error {
	c := *e
	c.VM, c.Envd = vm, envd
	return &c
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause given to New by %w.
func (e *Error) Unwrap() error { return e.cause }

// Is reports whether target is an *Error of the same code.
func (e *Error) Is(target error) bool {
	var t *Error
	return errors.As(target, &t) && t.Code == e.Code
}

// HTTP returns the HTTP status of the code; 500 for a code this version does not know.
func (e *Error) HTTP() int {
	if k, ok := kinds[e.Code]; ok {
		return k.http
	}
	return 500
}

// Retryable reports whether the same call may succeed later.
func (e *Error) Retryable() bool { return kinds[e.Code].retryable }

// RetrySeconds is the value of Retry-After: at least 1 for 429 and 503, else 0.
func (e *Error) RetrySeconds() int {
	if h := e.HTTP(); h != 429 && h != 503 {
		return 0
	}
	return max(1, e.RetryAfter)
}

// Body is the JSON body of every REST error.
type Body struct {
	Code      int    `json:"code"` // the HTTP status: SDKs read it
	Message   string `json:"message"`
	Error     Code   `json:"error"`
	Retryable bool   `json:"retryable"`
	SandboxID string `json:"sandboxID,omitempty"`
	VM        string `json:"vm,omitempty"`
	Envd      string `json:"envd,omitempty"`
}

// Body returns the REST spelling. Messages of 503 contain "service unavailable", which clients look for.
func (e *Error) Body() Body {
	msg := e.Message
	if e.HTTP() == 503 {
		msg = "service unavailable: " + msg
	}
	return Body{
		Code: e.HTTP(), Message: msg, Error: e.Code, Retryable: e.Retryable(),
		SandboxID: e.SandboxID, VM: e.VM, Envd: e.Envd,
	}
}

// As finds the *Error in err's chain; anything else becomes an internal error with err's text. Nil stays nil.
func As(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: Internal, Message: err.Error(), cause: err}
}

// ToStatus returns the ttrpc spelling of err; nil stays nil. Context errors keep their own codes.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	code := codes.Internal
	if k, ok := kinds[As(err).Code]; ok {
		code = k.grpc
	}
	return status.Error(code, Encode(err))
}

// Encode returns an error as the text that travels in a status message or in a field of an answer. Decode undoes it.
func Encode(err error) string {
	raw, jsonErr := json.Marshal(As(err))
	if jsonErr != nil {
		return err.Error()
	}
	return string(raw)
}

// Decode returns the error that Encode made a text of; any other text is the message of an internal error.
func Decode(text string) *Error {
	var e Error
	if json.Unmarshal([]byte(text), &e) != nil || e.Code == "" {
		return New(Internal, "%s", text)
	}
	return &e
}

// FromStatus undoes ToStatus on an error that came over ttrpc. An error of another origin is returned as it is.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	var e Error
	if json.Unmarshal([]byte(s.Message()), &e) != nil || e.Code == "" {
		return err
	}
	return &e
}
