package guest

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"

	"connectrpc.com/connect"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
)

// WarmUp does in a freshly booted guest what nearly every user does first, so that the template's snapshot holds the pages it
// takes: a login shell, the Python interpreter, a file written and read. It leaves nothing behind but warm caches.
func (g *Guest) WarmUp(ctx context.Context) error {
	const path = "/tmp/.torpor-warm-up"
	if err := g.writeFile(ctx, path, []byte("warm")); err != nil {
		return fmt.Errorf("warm up: write a file: %w", err)
	}
	if err := g.readFile(ctx, path); err != nil {
		return fmt.Errorf("warm up: read a file: %w", err)
	}
	for _, script := range []string{"true", "python3 -c pass", "ls -l / >/dev/null; date >/dev/null; cat /etc/os-release >/dev/null", "rm -f " + path} {
		if err := g.run(ctx, script); err != nil {
			return fmt.Errorf("warm up: %q: %w", script, err)
		}
	}
	return nil
}

// run executes a script in a login shell, as SDKs do, and fails unless it exits with 0.
func (g *Guest) run(ctx context.Context, script string) error {
	client := g.httpClient()
	defer client.CloseIdleConnections()
	noStdin := false
	req := connect.NewRequest(&envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", script}},
		Stdin:   &noStdin,
	})
	asUser(req.Header())
	stream, err := envdconnect.NewProcessClient(client, "http://envd", connect.WithProtoJSON(), connect.WithReadMaxBytes(1<<20)).Start(ctx, req)
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		if end := stream.Msg().GetEvent().GetEnd(); end != nil {
			if !end.Exited || end.ExitCode != 0 {
				return fmt.Errorf("it ended with %.100q", end.Status)
			}
			return nil
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

func (g *Guest) writeFile(ctx context.Context, path string, data []byte) error {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("file", path)
	if err != nil {
		return err
	}
	if _, err := part.Write(data); err != nil {
		return err
	}
	if err := form.Close(); err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, filesURL(path), &body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", form.FormDataContentType())
	return g.do(req)
}

func (g *Guest) readFile(ctx context.Context, path string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, filesURL(path), nil)
	if err != nil {
		return err
	}
	return g.do(req)
}

func filesURL(path string) string {
	return "http://envd/files?" + url.Values{"path": {path}, "username": {"user"}}.Encode()
}

func (g *Guest) do(req *http.Request) error {
	client := g.httpClient()
	defer client.CloseIdleConnections()
	asUser(req.Header)
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("envd answered status %d: %.200q", resp.StatusCode, said)
	}
	return nil
}

// asUser names the guest user the way SDKs do: basic auth without a password.
func asUser(h http.Header) {
	h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("user:")))
}
