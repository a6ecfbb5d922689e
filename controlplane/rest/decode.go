package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"torpor/api/apierr"
)

// maxBody bounds a request body of REST.
const maxBody = 1 << 20

// decode reads a JSON object strictly: unknown fields, wrong types and anything after the object are refused and named.
func decode(r *http.Request, into any) error {
	body, err := readBody(r)
	if err != nil {
		return err
	}
	if len(body) == 0 {
		return apierr.New(apierr.BadRequest, "the request needs a JSON body")
	}
	return decodeObject(body, into)
}

// decodeOptional is decode for routes whose body may be left out.
func decodeOptional(r *http.Request, into any) error {
	body, err := readBody(r)
	if err != nil || len(body) == 0 {
		return err
	}
	return decodeObject(body, into)
}

func readBody(r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	if err != nil {
		return nil, apierr.New(apierr.BadRequest, "read the request body: %w", err)
	}
	if len(body) > maxBody {
		return nil, apierr.New(apierr.BadRequest, "the request body is larger than %d bytes", maxBody)
	}
	return bytes.TrimSpace(body), nil
}

func decodeObject(body []byte, into any) error {
	if !utf8.Valid(body) {
		return apierr.New(apierr.BadRequest, "the request body is not valid UTF-8")
	}
	if body[0] != '{' {
		return apierr.New(apierr.BadRequest, "the request body must be a JSON object")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return decodeError(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return apierr.New(apierr.BadRequest, "the request body goes on after its JSON object")
	}
	return nil
}

func decodeError(err error) error {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return apierr.New(apierr.BadRequest, "field %q must not be a JSON %s", wrongType.Field, wrongType.Value)
	}
	// encoding/json has no type for this one.
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return apierr.New(apierr.UnknownField, "unknown field %s", name)
	}
	return &apierr.Error{Code: apierr.BadRequest, Message: fmt.Sprintf("the request body is not valid JSON: %v", err)}
}
